"""What the `octavo` command does, one module a verb. Imported when the verb is used."""

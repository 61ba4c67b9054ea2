"""The bench of the sampler draws in every form."""

import json

from bench.sampling import FORMS, main


def test_every_form_is_printed_as_one_json_object_a_line(capsys):
    main(["--quick"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["name"] for line in lines] == [f"sampling_us_{name}" for name in ("floor", *FORMS)]
    assert all(line["value"] > 0 and line["ratio"] > 0 for line in lines)

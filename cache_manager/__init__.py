"""One worker's books, and the service that keeps them for a fleet."""

"""Records <-> protobuf, both directions, once: a module for each pair of neighbours.

Reading checks shape only: whole numbers of u32, runs that end where they say, fields that must be there. A message
that fails raises `InvalidRequest` with the field's name and both numbers. What the values mean is judged by who owns
the state. Names: `x_to_wire` makes a message, `x_from_wire` makes a record.
"""

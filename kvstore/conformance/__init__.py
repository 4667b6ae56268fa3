"""The kit by which other writers and readers prove that they conform; rests on the format alone."""

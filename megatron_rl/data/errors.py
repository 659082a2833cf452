"""What a person can get wrong about data."""


class DataError(ValueError):
    """One line for a person: the file, line or source, what was expected and what to do."""

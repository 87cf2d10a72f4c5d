import pytest


@pytest.fixture(scope="module", autouse=True)
def all_interpreted(interpreted: None) -> None:
    """In this room every test is; see `interpreted`."""

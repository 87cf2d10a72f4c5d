"""Conversations, for every client. Begin with `session.py`, or for several `scheduler.py`."""

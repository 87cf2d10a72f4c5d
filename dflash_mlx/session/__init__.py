"""Conversations, for every client: the chat, the command lines, a server.

Begin with `stream.py`: a Session answers a prompt round by round and keeps its caches for the next
turn; `many.py` answers several at once. `answer.py` makes text and figures of rounds,
`templates.py` prompts of messages, `text.py` text of tokens (stop texts, thoughts). `responder.py`
answers requests with one pair, `worker.py` runs them on a thread and cancels them.
"""

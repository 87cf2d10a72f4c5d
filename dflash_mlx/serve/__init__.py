"""A server that speaks OpenAI's and Anthropic's APIs: `dflash-serve`; docs/serve.md is its manual.

Begin with `session/worker.py`, the one thread that decodes, and `request_queue.py`, which hands it
requests and tells of answers. `replies.py` reads an answer; `openai_*.py` and `anthropic_*.py` are
the two APIs, `app.py` puts them together, `command.py` starts it. `guard.py` and `protocol.py` keep
others out.
"""

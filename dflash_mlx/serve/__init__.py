"""A server that speaks OpenAI's, Anthropic's and Ollama's APIs; docs/serve.md is its manual.

Begin with `service.py`, which takes every request on its way, and `request_queue.py`, which hands
answers that are asked for to the worker's thread. `openai_*.py`, `anthropic_api.py` and their like
are the APIs, `app.py` puts them together, `guard.py` keeps others out, `command.py` starts it.
"""

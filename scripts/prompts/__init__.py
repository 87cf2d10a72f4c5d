"""What `make_prompts.py` makes prompts from: programming tasks, chat templates, a filter."""

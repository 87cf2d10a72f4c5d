"""Conversations: prompts through chat templates, streamed answers, caches that turns share."""

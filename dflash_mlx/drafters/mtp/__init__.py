"""Multi-token prediction: a head of one decoder layer of the target's kind drafts token by token.

`model` is the network and its configuration, `kinds` what differs between targets, `checkpoint` the
files: in a target's own folder, split off, and ours.
"""

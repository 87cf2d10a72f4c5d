"""The two looks of the chat; their colours are those of Okabe and Ito, which nobody confuses.

Blue, orange and purple say where tokens come from, green and vermilion what went well and what not.
"""

from __future__ import annotations

from textual.theme import Theme

_TABLE = """
    primary               #56b4e9  #0072b2
    secondary             #8494a8  #5c6b7d
    success               #2fc08f  #007a58
    warning               #e69f00  #a86400
    error                 #f0743e  #b84300
    accent                #dc8fbb  #a3457f
    foreground            #dfe4ea  #1b232d
    background            #11151b  #fbfbf9
    surface               #171c24  #f1f2f0
    panel                 #202733  #e4e7e8
    primary-muted         #0f4468  #bfe0f6
    warning-muted         #5e4100  #fadb9c
    accent-muted          #5b2f4c  #f0cfe2
    border                #3b4a5e  #a9b6c3
    border-blurred        #2a3442  #c9d1d9
    scrollbar             #33404f  #c0c8d0
    scrollbar-background  #11151b  #fbfbf9
"""
_NAMES, *_COLOURS = zip(*map(str.split, _TABLE.strip().splitlines()), strict=True)
THEMES = {
    name: Theme(
        f"dflash-{name}",
        **dict(zip(_NAMES[:10], colours, strict=False)),
        dark=name == "dark",
        variables=dict(zip(_NAMES[10:], colours[10:], strict=True)),
    )
    for name, colours in zip(("dark", "light"), _COLOURS, strict=True)
}
DARK, LIGHT = THEMES.values()

"""The two looks of the chat; their colours are those of Okabe and Ito, which nobody confuses.

Blue, orange and purple say where tokens come from, green and vermilion what went well and what not.
"""

from __future__ import annotations

from textual.theme import Theme

DARK = Theme(
    name="dflash-dark",
    primary="#56b4e9",
    secondary="#8494a8",
    success="#2fc08f",
    warning="#e69f00",
    error="#f0743e",
    accent="#dc8fbb",
    foreground="#dfe4ea",
    background="#11151b",
    surface="#171c24",
    panel="#202733",
    dark=True,
    variables={
        "primary-muted": "#0f4468",
        "warning-muted": "#5e4100",
        "accent-muted": "#5b2f4c",
        "border": "#3b4a5e",
        "border-blurred": "#2a3442",
        "scrollbar": "#33404f",
        "scrollbar-background": "#11151b",
    },
)
LIGHT = Theme(
    name="dflash-light",
    primary="#0072b2",
    secondary="#5c6b7d",
    success="#007a58",
    warning="#a86400",
    error="#b84300",
    accent="#a3457f",
    foreground="#1b232d",
    background="#fbfbf9",
    surface="#f1f2f0",
    panel="#e4e7e8",
    dark=False,
    variables={
        "primary-muted": "#bfe0f6",
        "warning-muted": "#fadb9c",
        "accent-muted": "#f0cfe2",
        "border": "#a9b6c3",
        "border-blurred": "#c9d1d9",
        "scrollbar": "#c0c8d0",
        "scrollbar-background": "#fbfbf9",
    },
)
THEMES = {"dark": DARK, "light": LIGHT}

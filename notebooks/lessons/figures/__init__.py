"""Figures: their look, their parts, live runs, and the still pictures of them."""

PLOTLY_MIME = "application/vnd.plotly.v1+json"
WIDGET_MIME = "application/vnd.jupyter.widget-view+json"

"""Sphinx settings: executed notebooks as they are, and nothing from another host.

`make docs` runs the course at `tier="cpu"`, turns the stored figures into HTML that calls the site's own plotly.js and the
formulas into drawings, and builds with warnings as errors. On a phone (site.css) wide things keep their width inside boxes
that scroll. tests/test_docs.py looks for anything that would load from elsewhere.
"""

project = "lpkit"
html_title = "lpkit"
extensions = ["myst_nb"]
exclude_patterns = []
nb_execution_mode = "off"       # lpkit.course.notebooks ran them; see build.py
nb_ipywidgets_js = {}           # the default loads widgets from a CDN
nb_merge_streams = True
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type"]     # a widget's own mime beside text that is shown
html_theme = "sphinx_book_theme"
html_context = {"default_mode": "auto"}
html_static_path = ["_static"]
html_extra_path = ["extra"]     # the planner, where it could be made
html_css_files = ["figure.css", "site.css"]      # the first is the widgets' own: figures follow the theme
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {"use_download_button": False, "use_fullscreen_button": False, "navigation_with_keys": False,
                      "footer_content_items": []}


def setup(app):
    app.connect("html-page-context", only_where_drawn)


def only_where_drawn(app, page, template, context, doctree):
    """plotly.js (5 MB) is loaded by the pages that hold a figure, from this site."""
    if 'class="lpkit-figure"' in context.get("body", ""):
        app.add_js_file("plotly.min.js", priority=100)

"""Sphinx settings: show the executed notebooks unchanged, and load nothing from other hosts.

`make docs` runs the course at `tier="cpu"`, turns the stored figures into HTML that calls the site's own plotly.js and the
formulas into drawings, and builds with warnings as errors. On a phone (site.css) wide tables and figures keep their width inside boxes that scroll. tests/project/test_docs.py tests that no
page loads from another host.
"""

import html

from docutils import nodes

project = "lpkit"
html_title = "lpkit"
extensions = ["myst_nb"]
exclude_patterns = []
nb_execution_mode = "off"       # build.py has run the notebooks
nb_ipywidgets_js = {}           # the default loads widgets from a CDN
nb_merge_streams = True
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type"]     # the MIME type of a widget whose text is shown instead
html_theme = "sphinx_book_theme"
html_context = {"default_mode": "auto"}
html_static_path = ["_static"]
html_extra_path = ["extra"]     # the planner, if it could be made
html_css_files = ["figure.css", "site.css"]      # figure.css is the stylesheet of the widgets, so figures follow the theme
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {"use_download_button": False, "use_fullscreen_button": False, "navigation_with_keys": False, "navbar_persistent": [],
                      "footer_content_items": []}


def setup(app):
    app.connect("html-page-context", only_where_drawn)
    app.connect("html-page-context", described)


def described(app, page, template, context, doctree):
    """Add meta tags for search engines and link previews: the page's title, its first paragraph and, if the site has an address,
    a picture."""
    if doctree is None or (paragraph := doctree.next_node(nodes.paragraph)) is None:
        return
    text = " ".join(paragraph.astext().split())
    told = {"og:title": context["title"], "og:description": text if len(text) <= 200 else f"{text[:197]}...", "og:type": "website"}
    if base := app.config.html_baseurl:
        told |= {"og:url": f"{base.rstrip('/')}/{page}.html", "og:image": f"{base.rstrip('/')}/_static/preview.png"}
    tags = [f'<meta name="description" content="{html.escape(told["og:description"])}">',
            *(f'<meta property="{name}" content="{html.escape(value)}">' for name, value in told.items())]
    context["metatags"] += "\n".join(tags)


def only_where_drawn(app, page, template, context, doctree):
    """Load plotly.js (5 MB, from this site) only on pages with a figure."""
    if 'class="lpkit-figure"' in context.get("body", ""):
        app.add_js_file("plotly.min.js", priority=100)
        app.add_js_file("panels.js", priority=100)

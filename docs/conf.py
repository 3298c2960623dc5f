"""Sphinx settings: executed notebooks as they are, and nothing from another host.

`make docs` runs the course at `tier="cpu"`, turns the stored figures into HTML that calls the site's own plotly.js and the
formulas into drawings, and builds with warnings as errors. On a phone (site.css) wide things keep their width inside boxes
that scroll. tests/project/test_docs.py looks for anything that would load from elsewhere.
"""

import html

from docutils import nodes

project = "lpkit"
html_title = "lpkit"
extensions = ["myst_nb"]
exclude_patterns = []
nb_execution_mode = "off"       # hosting.runner ran them; see build.py
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
html_theme_options = {"use_download_button": False, "use_fullscreen_button": False, "navigation_with_keys": False, "navbar_persistent": [],
                      "footer_content_items": []}


def setup(app):
    app.connect("html-page-context", only_where_drawn)
    app.connect("html-page-context", described)


def described(app, page, template, context, doctree):
    """Search engines and previews of links show the page's title, its first paragraph and, once the site has an address, a picture."""
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
    """plotly.js (5 MB) is loaded by the pages that hold a figure, from this site."""
    if 'class="lpkit-figure"' in context.get("body", ""):
        app.add_js_file("plotly.min.js", priority=100)
        app.add_js_file("panels.js", priority=100)

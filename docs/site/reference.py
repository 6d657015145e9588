"""The Sphinx directives of the two pages that are made from the code when the site is built."""

from api import api_markdown
from docutils import nodes
from settings_table import config_markdown
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata


class ConfigFields(SphinxDirective):
    """```{config-fields}```: every field of configs/base.py."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(config_markdown(), allow_section_headings=True)


class PublicNames(SphinxDirective):
    """```{public-names}```: every name of ragen_jax.EXPORTS."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(api_markdown(), allow_section_headings=True)


def setup(app: Sphinx) -> ExtensionMetadata:
    """What Sphinx calls: the pages are read anew by every build."""
    app.add_directive("config-fields", ConfigFields)
    app.add_directive("public-names", PublicNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""WebShop. Modules: `catalogue` (products), `goals` (of buyers), `search`, `shop` (combines the
three), `files` (of the data set), `shop_cache` (their cache), `pages` (as text), `reward` (the
published rule), `expert`, `env` (the rules)."""

from ragen_jax.envs.webshop.env import WebShop

__all__ = ["WebShop"]

"""Names of arms: two words each, which connote nothing, safety or danger."""

# Connotation -> (first words, second words).
_WORDS: dict[str, tuple[str, str]] = {
    "nothing": (
        "Red Blue Green Brown Grey Round Square Long Flat Oval",
        "Table Window Button Folder Bottle Ladder Pencil Ticket Basket Curtain Drawer Bucket",
    ),
    "safety": (
        "Calm Safe Steady Gentle Quiet Modest Patient Careful",
        "Harbor Anchor Garden Cottage Shepherd Library Pasture Blanket Teapot Orchard Tortoise "
        "Cushion",
    ),
    "danger": (
        "Wild Daring Fierce Reckless Stormy Blazing Rash Frantic",
        "Dragon Volcano Gambler Pirate Rocket Tornado Comet Tiger Stuntman Lightning Avalanche "
        "Matador",
    ),
}
WORDS = {kind: (first.split(), second.split()) for kind, (first, second) in _WORDS.items()}
NAMES = {
    kind: tuple(f"{first} {second}" for first in firsts for second in seconds)
    for kind, (firsts, seconds) in WORDS.items()
}

# The option `names` -> connotations of (sure arms, risky arms).
CONNOTATIONS = {
    "neutral": ("nothing", "nothing"),
    "fitting": ("safety", "danger"),
    "misleading": ("danger", "safety"),
}

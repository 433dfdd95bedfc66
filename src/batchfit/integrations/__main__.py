"""Starts batchfit's torchtune recipes: `tune run batchfit.integrations.torchtune`.

`tune run` takes what follows the last dot for a file's suffix, cuts it off, and runs the rest as a module:
this package. (`tune run batchfit/integrations/torchtune.py` runs the module itself.)
"""

from __future__ import annotations

import sys

from batchfit.integrations.torchtune import recipe_main

if __name__ == "__main__":
    sys.exit(recipe_main())

"""What the libraries under torch are told before their first use; importing this is enough.

MKL may order the sums of a float32 product by how its threads and their memory happen to lie:
on some processors two forwards of one shape then differ in their last bits (seen on an AMD EPYC
with two threads, not with one, and not in bfloat16, which MKL does not compute). Asked for
reproducible results it keeps to one order, at no cost that could be measured there. Who has set
the variable keeps what was set.
"""

from __future__ import annotations

import os
from typing import Final

MKL_PATH: Final = "AUTO"
"""The best code path of this processor, but always the same one."""

os.environ.setdefault("MKL_CBWR", MKL_PATH)

"""The code that tutorials show as text, such as 16_your_trainer."""

import re

from documents import TUTORIALS, cells_of


def shown_under(heading, names, tutorial="16"):
    """Run the code under a heading, where these names are known; returns all names."""
    [path] = [path for path in TUTORIALS if path.stem.startswith(tutorial)]
    text = "\n".join(cells_of(path, "markdown"))
    [section] = re.findall(rf"(?ms)^## {heading}$(.*?)^## ", text)
    [code] = re.findall(r"(?s)```python\n(.*?)```", section)
    names = {"__name__": "shown", **names}
    exec(compile(code, heading, "exec"), names)
    return names

"""Charts and pages of results, drawn as text and as SVG.

Pure. `figures.py` chooses marks and lines, `svg.py` and `text.py` draw them, `memory_page.py` and
`throughput_page.py` lay out the screens of `explain` and `profile`.
"""

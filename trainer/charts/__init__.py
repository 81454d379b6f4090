"""Every chart of every page, as inline SVG.

A chart takes plain values and gives `Markup` for a page. Its colours are classes of the pages' style sheet, so it follows light and
dark; its text is the browser's, so class names may be in any script; what the pointer rests on says its value (`<title>`). Lengths are in
units of the drawing, which are pixels where the page is as wide as the drawing.
"""

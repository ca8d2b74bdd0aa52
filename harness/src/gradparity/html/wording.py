"""The fixed texts of the page: title, summary, style.

In: nothing. Out: texts.
"""

TITLE = "gradparity report"
SUMMARY = "{cases} cases, {divergences} divergences, {distinct} distinct"
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1160px;
  padding: 0 1em; color: #222; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #ddd; }
#summary { font-size: 1.2em; } .versions { color: #777; font-size: .85em; }
.badge { color: #fff; border-radius: 4px; padding: 1px 7px; margin-right: 6px; font-size: .85em; }
details { border: 1px solid #ddd; border-radius: 6px; padding: 6px 12px; margin: 8px 0; overflow-x: auto; }
summary { cursor: pointer; } pre { background: #f6f6f6; padding: 8px; white-space: pre-wrap; }
table { border-collapse: collapse; font-size: .85em; } td, th { border: 1px solid #ddd; padding: 2px 8px; }
tr.DIVERGE td { background: #fdecea; }
svg.timelines { max-width: 100%; height: auto; } svg .head { font: bold 14px system-ui, sans-serif; }
svg .call { font: 12px ui-monospace, monospace; }
"""

"""The fixed texts of the page: title, summary, keys.

In: nothing. Out: texts. Its style and its behaviour stand in `page.css` and `page.js`.
"""

TITLE = "gradparity report"
SUMMARY = "{cases} cases, {divergences} divergences, {distinct} distinct"
SORTS = ("importance", "cases", "case", "seconds")
KEYS = {
    "/": "search",
    "j, k": "next and last divergence; Enter opens it",
    "v, b, s": "next verdict, next subject, next order",
    "c": "copy the command of the divergence",
    "t": "light or dark",
    "Escape": "search no more",
}

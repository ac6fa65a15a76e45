"""A report of results: sentences, tables and pictures, on the terminal, as Markdown and as an HTML page.

``sentences``  verdicts in words, and the names and numbers in them
``document``   a report and an overview of several as blocks of ``ktbridge.document``
``charts``     contents of the page's pictures
``html``       the page; its template, style and script are in ``page/``
"""

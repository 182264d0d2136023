"""From any file to documents and rows, with a ledger of what was read.

    a name         "my_documents/", "faq.csv", "pages/**/*.md", "docstrings", "-"
      |  find.py       which files it stands for: `Source`
      |  open.py       how each is read, decided once: `Opened`
      |
      |-- lines     text/    bytes to text (encodings.py), text to lines (lines.py)
      |-- tables    tables/  csv, json, Parquet and others to a `Table` of rows (formats.py lists
      |                      them); layout.py: which columns are the id, the title and the text
      `-- prose     files/   markdown, html, pdf and others to titled sections (formats.py lists
      |                      them), in processes with limits (pool.py)
      v
    `Documents`    a source that can be read; each pass yields a `Document` for a text
                   (document.py), which has sections of lines (sentences.py)

memory.py makes documents of strings, dicts and tables in Python, docstrings.py of installed
packages. Each step enters what it keeps and what it leaves out in a `Ledger` (ledger.py).
language.py says which languages texts are in.
"""

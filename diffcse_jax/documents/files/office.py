"""Office documents, as the Markdown that the library kreuzberg makes of them."""

import collections
import html
import io
import re
import zipfile
from collections.abc import Mapping

from diffcse_jax.documents.files import (
    MOST_BYTES,
    EncryptedError,
    TooLargeError,
    TooRepetitiveError,
)
from diffcse_jax.errors import require_extra

OFFICE_EXTRA = "office"
OPEN_XML = "application/vnd.openxmlformats-officedocument"
OPEN_DOCUMENT = "application/vnd.oasis.opendocument"
OFFICE = {  # what kreuzberg reads, by extension
    ".docx": f"{OPEN_XML}.wordprocessingml.document",
    ".docm": f"{OPEN_XML}.wordprocessingml.document",
    ".doc": "application/msword",
    ".pptx": f"{OPEN_XML}.presentationml.presentation",
    ".pptm": f"{OPEN_XML}.presentationml.presentation",
    ".ppt": "application/vnd.ms-powerpoint",
    ".xlsx": f"{OPEN_XML}.spreadsheetml.sheet",
    ".xlsm": f"{OPEN_XML}.spreadsheetml.sheet",
    ".xls": "application/vnd.ms-excel",
    ".ods": f"{OPEN_DOCUMENT}.spreadsheet",
    ".odt": f"{OPEN_DOCUMENT}.text",
    ".epub": "application/epub+zip",
    ".rtf": "application/rtf",
    ".eml": "message/rfc822",
    ".msg": "application/vnd.ms-outlook",
    ".fb2": "application/x-fictionbook+xml",
}
SHEETS = {".xlsx", ".xlsm", ".xls", ".ods"}  # which are all tables
PARTS = {*SHEETS, ".pptx", ".pptm", ".ppt", ".epub"}  # of equal rank, each with a heading
ZIP, OLE = b"PK\x03\x04", b"\xd0\xcf\x11\xe0"  # at the start of a file
ENCRYPTED_PART = "EncryptedPackage".encode("utf-16-le")
MARKUP_PARTS = (".xml", ".xhtml", ".html", ".htm")
KEPT_PARTS = ("[Content_Types].xml", "META-INF/container.xml")
REFERENCE = re.compile(r"&(?:amp|lt|gt|#\d{1,7}|#[xX][\da-fA-F]{1,6});")
FOOTNOTE_NUMBER = re.compile(r"\[\^\d+\](?!:)")
UNREAD_PARTS = {  # by the start of a name
    "ppt/notesSlides/notesSlide": "note{s} of a slide",
    "word/comments": "part{s} with comments",
    "word/header": "page header{s}",
    "word/footer": "page footer{s}",
}
# Cells that span columns are repeated, and sheets store a repeated text once: by so many characters
# for each byte of the unpacked file, and these.
MOST_REPEATED = 30
MOST_OF_SMALL = 1 << 20
STAND_INS = {"&": "\ue0a6", "<": "\ue0a7", ">": "\ue0a8"}  # private use


def office_markdown(content: bytes, kind: str) -> tuple[str, Mapping[str, int]]:
    """Return the text of a document as Markdown, and how many parts are not read, by kind.

    In the text, other characters stand for `&`, `<` and `>` until it is HTML: see
    `without_stand_ins`. Markdown has no way to write them that means the same in code and outside.
    """
    if content.startswith(OLE) and ENCRYPTED_PART in content:
        raise EncryptedError
    kreuzberg = require_extra("kreuzberg", OFFICE_EXTRA)
    config = kreuzberg.ExtractionConfig(use_cache=False, output_format="markdown", disable_ocr=True)
    unread: Mapping[str, int] = {}
    if content.startswith(ZIP):
        unread = _unread_parts(content)
        content = _with_stand_ins(content)
    text = kreuzberg.extract_bytes_sync(content, OFFICE[kind], config).content
    if len(text) > MOST_OF_SMALL + MOST_REPEATED * len(content):
        raise TooRepetitiveError
    return FOOTNOTE_NUMBER.sub("", text), unread


def without_stand_ins(markup: str) -> str:
    """Return HTML with the characters that others stand for in the text of a document."""
    for character, stand_in in STAND_INS.items():
        markup = markup.replace(stand_in, html.escape(character))
    return markup


def _unread_parts(content: bytes) -> Mapping[str, int]:
    """Return how many parts of a zip file kreuzberg leaves out, by kind."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = archive.namelist()
    counts: collections.Counter[str] = collections.Counter()
    for start, kind in UNREAD_PARTS.items():
        counts[kind] += sum(name.startswith(start) for name in names)
    return +counts


def _with_stand_ins(content: bytes) -> bytes:
    """Return a zip file in which other characters stand for `&`, `<` and `>` of texts.

    Kreuzberg 4.10 loses them in docx (`AT&T` becomes `ATT`), and takes them for tags in epub.
    """
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(packed, "w") as new:
        if sum(part.file_size for part in old.infolist()) > MOST_BYTES:
            raise TooLargeError
        for part in old.infolist():
            data = old.read(part)
            if part.filename.endswith(MARKUP_PARTS) and part.filename not in KEPT_PARTS:
                data = _with_stand_ins_in(data)
            new.writestr(part.filename, data)
    return packed.getvalue()


def _with_stand_ins_in(data: bytes) -> bytes:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return data

    def character(reference: re.Match[str]) -> str:
        text = html.unescape(reference[0])
        return STAND_INS.get(text, text)

    return REFERENCE.sub(character, text).encode(errors="replace")

"""The names of columns by which their part is known: ids, titles, texts, pairs and grades."""

ID_COLUMNS = ("_id", "id")
TITLE_COLUMN = "title"
TEXT_COLUMNS = ("text", "sentence")  # the known names of a text

# The names of the sentence, the positive and the hard negatives. A number may follow the last one.
FORMS = (
    ("sentence", "positive", "hard_negative"),
    ("sent0", "sent1", "hard_neg"),  # SimCSE
    ("anchor", "positive", "negative"),  # sentence-transformers
    ("query", "positive", "negative"),
    ("question", "positive", "negative"),
    ("query", "answer", "negative"),
    ("question", "answer", "negative"),
    ("sentence1", "sentence2", ""),
)
LISTS = ("query", "pos", "neg")  # FlagEmbedding
NAMES = frozenset(name for form in (*FORMS, LISTS) for name in form if name)
# Columns that grade a pair. Without a column that is called positive, such pairs are not positives.
GRADES = frozenset(("label", "labels", "gold_label", "is_duplicate"))
GRADES |= {"rating", "score", "similarity_score"}

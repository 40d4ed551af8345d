"""The names that options of the data take; apart from what they do, which imports numpy."""

ORDER_CHOICES = ("shuffled", "short-to-long", "bucketed")
LONG_DOCUMENT_CHOICES = ("split", "truncate", "refuse")

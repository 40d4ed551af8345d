"""The names that options of the data take; apart from what they do, which imports numpy."""

BUCKETED = "bucketed"
ORDER_CHOICES = ("shuffled", "short-to-long", BUCKETED)
LONG_DOCUMENT_CHOICES = ("split", "truncate", "refuse")

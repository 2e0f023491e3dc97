"""The little that the numbered scripts share."""

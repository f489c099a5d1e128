"""The units: each file holds exact integers, hardware and cycles of one part."""

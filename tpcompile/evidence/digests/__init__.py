"""`RankRecord` -> layers of canonical items -> `RankDigest`."""

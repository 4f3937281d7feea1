"""Device headers, one wrapper per PTX instruction."""

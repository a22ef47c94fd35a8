"""What commands print: tables, charts and sentences for the terminal."""

"""A page of all tables and figures of the paper, with this project's beside them."""

"""Pure values: what is stored, what is asked, and the plan between the two."""

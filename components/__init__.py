"""The pipeline's steps, the loop's roles, and what the roles share."""

"""Plain data that everything else knows: a state and its cursors, hashes, large numbers as people write them."""

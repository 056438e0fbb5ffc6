"""What the reference pages say, made of the program: tables of the pages, and parts that only the site has."""

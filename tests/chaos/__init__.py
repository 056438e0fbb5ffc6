"""Real servers, Redis and trainers under attack, and a checker that trusts none of them: see README.md."""

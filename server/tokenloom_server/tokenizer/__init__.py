"""From rows to tokens: the tokeniser's definition, the engine that runs it, and the documents it makes."""

"""What endless reading needs: what to forget, how to choose the next token, whose turn it is."""

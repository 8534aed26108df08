"""A page on which a person moves a scheme's numbers and sees at once what becomes of them."""

"""Tables, figures and pages, from the files of a run alone. No torch here."""

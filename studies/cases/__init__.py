"""Small trainings whose truth is known by training them."""

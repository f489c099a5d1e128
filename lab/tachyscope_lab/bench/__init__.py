"""What a plan saves: work counted by the meter, and time that must first beat its own noise."""

"""Two programs that check Muon from outside: a model of device queues, and a player of random plans."""

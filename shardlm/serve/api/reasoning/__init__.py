"""What a model thinks before it answers, apart from the answer, one file a way of marking it; `choose` names them."""

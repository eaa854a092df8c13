def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth.split("####")[-1].strip() in solution_str[-60:])

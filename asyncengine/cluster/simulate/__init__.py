"""Plans for clusters that are not there: arrivals, failures and churn over the functions that place and route.

asyncengine simulate placement --help
"""
